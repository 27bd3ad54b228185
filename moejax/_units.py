"""SI multipliers, for presets and for output columns only.

Inside moejax every time is in seconds, every size in bytes and every rate per second. Nothing in a
kernel multiplies by one of these.
"""

KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12
MILLI, MICRO, NANO, PICO = 1e-3, 1e-6, 1e-9, 1e-12

GB, TB = GIGA, TERA
GBPS, TBPS = GIGA, TERA
TFLOPS = TERA
MS, US, NS = MILLI, MICRO, NANO
