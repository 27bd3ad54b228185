"""The color, marker and dash of every policy, the same in every figure.

Colors are those of Okabe and Ito, which stay apart for the common kinds of color blindness, and a
few of other lightness for the variants; marker and dash repeat what the color says.
"""

import zlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PolicyStyle:
    """How one policy looks in every figure."""

    label: str
    color: str
    marker: str = "o"
    dash: Any = "-"
    width: float = 1.5
    size: float = 4.5
    order: int = 50  # in the legend; and later is drawn on top


# Policies often choose alike, and then their points coincide. What is drawn later is therefore
# thinner or broken, and the two broken lines fill each other's gaps.
POLICIES = {
    "no_exp": PolicyStyle("NoExp", "#8A8F98", "s", order=10),
    "all_exp": PolicyStyle("AllExp", "#56B4E9", "D", order=11),
    "few_tokens": PolicyStyle("N ≤ 4 rule", "#CC79A7", "v", width=3.2, size=6.5, order=20),
    "pimoe_threshold": PolicyStyle("PIMoE threshold", "#009E73", "^", order=21),
    "pimoe_channel": PolicyStyle("PIMoE channel", "#0072B2", "P", size=5.5, order=22),
    "sieve": PolicyStyle("Sieve", "#D55E00", "o", width=3.0, size=6.5, order=70),
    "sieve_no_attention": PolicyStyle("Sieve, no attention", "#E69F00", "<", (0, (3, 3)), order=71),
    "sieve_no_comm": PolicyStyle("Sieve, no comm.", "#7A5230", ">", (3, (3, 3)), order=72),
    "best_prefix": PolicyStyle("Best prefix", "#1F2933", "x", (0, (1, 2)), 1.0, 3.5, order=80),
    "optimal": PolicyStyle("Optimal", "#5B2A86", "+", (0, (1, 2)), 1.0, 4.5, order=81),
}

SPARE_COLORS = ("#332288", "#117733", "#882255", "#999933", "#44AA99", "#AA4499", "#6699CC")
SPARE_MARKERS = ("h", "p", "X", "d", "*")


def policy_style(name: str) -> PolicyStyle:
    """Color, marker and dash of a policy: by its name alone, so the same in every figure.

    A name that is not in the table gets a spare color by a checksum of the name.
    """
    if name in POLICIES:
        return POLICIES[name]
    digest = zlib.crc32(name.encode())
    color = SPARE_COLORS[digest % len(SPARE_COLORS)]
    return PolicyStyle(name, color, SPARE_MARKERS[digest // 7 % len(SPARE_MARKERS)])
