"""The PIM cost table as a scheduler would keep it: a dict from token count to time."""


class DictTable:
    """Sieve's cost table, one entry at a time."""

    def __init__(self, max_tokens, roofline_time, beta):
        """`roofline_time` is the time of one token, or a list with an entry for each count."""
        if not isinstance(roofline_time, list):
            roofline_time = [n * roofline_time for n in range(max_tokens + 1)]
        self.fallback, self.beta, self.learnt = roofline_time, beta, {}

    def lookup(self, n):
        return self.learnt.get(n, self.fallback[n])

    def update(self, counts, observed, valid):
        seen_now = {}
        for n, time, is_valid in zip(counts, observed, valid, strict=True):
            if is_valid:
                seen_now.setdefault(n, []).append(time)
        for n, times in seen_now.items():
            mean = sum(times) / len(times)
            if n in self.learnt:
                self.learnt[n] = (1 - self.beta) * self.learnt[n] + self.beta * mean
            else:
                self.learnt[n] = mean
