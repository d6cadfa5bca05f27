// The engine for processors of one level: setup.py has the compiler's options.
#include "engine.h"
