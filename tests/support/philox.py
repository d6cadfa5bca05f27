"""Philox4x32 in Python integers, as its paper states it."""


def philox(counter, key, rounds=10):
    """Return the four words that Philox4x32 makes from a counter of four words and a key of two words."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def triton_word(seed, offset, rounds):
    """Return the word of Triton's tl.randint(seed, offset, n_rounds=rounds)."""
    return philox((offset & 0xFFFFFFFF, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32), rounds)[0]
