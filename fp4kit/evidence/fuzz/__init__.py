"""Random programs of public calls, run on two engines and compared in every bit."""
