"""PIM devices. Timings are listed in full; what the GEMV model does not use says so."""

import dataclasses
from typing import Any

from moejax.hardware._bank_pim import BankPIM
from moejax.hardware._dram import DRAMTiming
from moejax.hardware._pim import RatePIM
from moejax.hardware._source import HardwarePreset, Source, cite


_DUPLEX = "hardware_config.h of the Duplex authors' public LLMSimulator (scale-snu)"
_HBM3_8000 = "ramulator2_pim.patch of Duplex's LLMSimulator, entry HBM3_8.0Gbps"
_HBM3_6400 = "Ramulator 2 hbm3.py, preset HBM3_6400Mbps"
_SAMSUNG = "SAIT PIMSimulator, ini/HBM2_samsung_2M_16B_x64.ini"
_NEUPIMS = "NeuPIMs, extern/NewtonSim/configs/HBM2_8Gb_x128_dualpim.ini"
_ATTACC = "AttAcc simulator, HBM3-PIM.cpp, preset HBM3_5.2Gbps"
_AIM = "aim_simulator (SK hynix AiM on Ramulator 2), preset GDDR6_2000_1350mV_double"

_TIMINGS = tuple(field.name for field in dataclasses.fields(DRAMTiming))


def _timing(source: str, confidence: str, **nanoseconds: float) -> tuple[Source, ...]:
    rows = ()
    for name, value in nanoseconds.items():
        note = "" if name in _TIMINGS else "not used by the GEMV model"
        # Through text: 14 * 1e-9 is 1.4000000000000001e-08.
        rows += (Source(f"timing.{name}", float(f"{value}e-9"), source, confidence, note),)
    return rows


def _make_bank_pim(values: dict[str, Any], host: dict[str, Any] | None) -> BankPIM:
    timing = DRAMTiming(**{name: values[f"timing.{name}"] for name in _TIMINGS})
    names = {field.name for field in dataclasses.fields(BankPIM)} & values.keys()
    fields = {name: values[name] for name in names}
    if host:
        fields["stacks"] = host["stacks"]
    return BankPIM(timing=timing, **fields)


def _make_rate_pim(values: dict[str, Any], host: dict[str, Any] | None) -> RatePIM:
    external = host["hbm_bandwidth"] if host else values["external_bandwidth"]
    return RatePIM(
        internal_bandwidth=values["internal_over_external"] * external,
        flop_per_byte=values["flop_per_byte"],
        contention=values["contention"],
        attention_overhead=values["attention_overhead"],
    )


_COMMON = cite(
    "choice of moejax: K and V rows pack worse than weights; Sieve does not state it",
    "low",
    attention_overhead=1.5,
)
_DUAL_ROW_BUFFERS = cite(
    "Sieve (arXiv 2605.11277): dual row buffers after NeuPIMs", "high", contention=0.0
)
_SINGLE_ROW_BUFFER = cite(
    "assumed: with one row buffer per bank, GPU loads and PIM exclude each other",
    "low",
    contention=1.0,
)

_B200_GEOMETRY = (
    cite("B200 has 8 HBM3E stacks; num_cube 8 in " + _DUPLEX, "high", stacks=8)
    + cite(
        "Duplex memory_config.h hbm3e_192GB; a third-party reading note gives the same for Sieve",
        "medium",
        pseudo_channels_per_stack=32,
    )
    + cite(
        "choice of moejax, Sieve's Table 1 is not public text: one rank of 4 groups of 4 banks",
        "low",
        "32 gives the 16x of AttAcc and Duplex, 8 units the 4x of Samsung",
        banks=16,
    )
    + cite("HBM3: 32 columns of 32 B (AttAcc HBM3-PIM.cpp, Ramulator 2)", "high", row_bytes=1024)
    + cite("HBM3: 32-bit pseudo-channel, burst of 8", "high", burst_bytes=32)
    + cite("NeuPIMs pim_comp_coverage; Samsung and AiM agree", "high", macs_per_unit=16)
    + cite(
        "NeuPIMs EstimatePIMOperationLatency: two groups of 4 banks per tFAW",
        "medium",
        "16 is AttAcc's all-bank activate, 4 is strict",
        banks_per_faw=8,
    )
    + cite("NeuPIMs channel_state.cc", "high", fill_columns=6)
    + cite("choice of moejax, not stated", "low", global_buffer_vectors=1)
    + _DUAL_ROW_BUFFERS
    + _COMMON
)

_HBM_PIM = HardwarePreset(
    "HBM3E with a 16-lane unit beside every bank: stand-in for the device of Sieve",
    _B200_GEOMETRY
    + _timing(
        _HBM3_8000,
        "medium",
        rcd=14,
        rp=14,
        ras=34,
        rtp=6,
        ccd_short=1,
        ccd_long=2,
        faw=30,
        cl=14,
        cwl=4,
        burst=1,
        refi=3900,
        **dict(ck=0.5, rcd_write=14, rc=48, rtp_short=4, ccd_all_banks_power_limited=3),
        **dict(rrd_short=1, rrd_long=2, wr=16, wtr_short=6, wtr_long=8),
    )
    + _timing("Ramulator 2 hbm3.py, refresh table of JESD238 (at most 8 Gb)", "medium", rfc=350)
    + _timing("tCCD_L between all-bank reads: " + _HBM3_8000, "medium", mac_cadence=2)
    + cite("256 x 16 x 32 B / 2 ns", "low", published__internal_bandwidth=65.536e12)
    + cite("16 multiply-adds per 32 B column", "low", published__flops_per_s=65.536e12)
    + cite("Duplex dram_config_HBM3E_192GB.yaml", "medium", published__ranks_per_pseudo_channel=3)
    + cite("B200, external", "medium", published__external_bandwidth=8e12)
    + cite(
        "B200",
        "medium",
        "a third-party reading note on Sieve's Table 1 says 96 GB",
        published__capacity_bytes=192e9,
    ),
    _make_bank_pim,
)

_HBM3_6400_PIM = HardwarePreset(
    "The same geometry on plain HBM3 at 6.4 Gb/s: slower tRCD and tRP, for sensitivity",
    _B200_GEOMETRY
    + _timing(
        _HBM3_6400,
        "high",
        rcd=19.38,
        rp=16.25,
        ras=28.12,
        rtp=5.62,
        ccd_short=1.25,
        ccd_long=2.5,
        faw=15,
        cl=12.5,
        cwl=6.25,
        rfc=350,
        refi=3900,
        **dict(ck=0.625, rcd_write=9.38, rc=45, rrd_short=2.5, rrd_long=3.12, wr=20.62),
    )
    + _timing("burst of 8 at 6.4 Gb/s", "high", burst=1.25)
    + _timing("assumed: tCCD_L, as for the 8.0 Gb/s device", "medium", mac_cadence=2.5),
    _make_bank_pim,
)

_SAMSUNG_PIM = HardwarePreset(
    "Samsung HBM-PIM (Aquabolt-XL): one unit per two banks, 300 MHz",
    cite("one stack unless the GPU has more", "low", stacks=1)
    + cite("SAIT PIMSimulator README: 4 per die, 4 dies", "high", pseudo_channels_per_stack=16)
    + cite(f"{_SAMSUNG}, NUM_PIM_BLOCKS: one unit per two of 16 banks", "high", banks=8)
    + cite("256-bit fp16 datapath, SAIT PIMSimulator README", "high", macs_per_unit=16)
    + cite(f"{_SAMSUNG}, NUM_COLS 128 x 8 B", "medium", row_bytes=1024)
    + cite("256-bit prefetch, SAIT PIMSimulator README", "high", burst_bytes=32)
    + cite("assumed: all-bank mode activates all units at once", "low", banks_per_faw=8)
    + cite("assumed equal to NeuPIMs", "low", fill_columns=6)
    + _SINGLE_ROW_BUFFER
    + _COMMON
    + _timing(
        _SAMSUNG,
        "high",
        rcd=14,
        rp=14,
        ras=33,
        rtp=5,
        ccd_short=2,
        ccd_long=4,
        faw=16,
        cl=20,
        cwl=8,
        rfc=350,
        refi=3900,
        **dict(ck=1, rcd_write=10, rc=47, rtp_short=4, rrd_short=4, rrd_long=6, wr=16),
    )
    + _timing("burst of 4 at 2.0 Gb/s, SAIT PIMSimulator README", "medium", burst=2)
    + _timing("one column at 300 MHz, the unit's clock", "medium", mac_cadence=1e3 / 300)
    + cite(
        "16 x 8 x 16 multiply-adds at 300 MHz; 1.2 TFLOP/s is usually quoted",
        "medium",
        "per stack",
        published__flops_per_s=1.2288e12,
    )
    + cite(
        "16 x 8 x 32 B x 300 MHz; a public summary quotes 1.23 TB/s",
        "medium",
        "per stack",
        published__internal_bandwidth=1.2288e12,
    )
    + cite(
        "1024 bit x 2.4 Gb/s; the simulator's 2.0 Gb/s gives 256 GB/s",
        "medium",
        "per stack; the GPU's own bandwidth is used",
        published__external_bandwidth=307.2e9,
    ),
    _make_bank_pim,
)

_NEUPIMS_PIM = HardwarePreset(
    "NeuPIMs: HBM2 with dual row buffers",
    cite("one device of 32 channels unless the GPU has more stacks", "low", stacks=1)
    + cite("NeuPIMs neupims.json", "high", pseudo_channels_per_stack=32)
    + cite(_NEUPIMS, "medium", "neupims.json says 32 per channel, the ini 4 x 4", banks=16)
    + cite("neupims.json pim_comp_coverage", "high", macs_per_unit=16)
    + cite("neupims.json dram_page_size", "high", row_bytes=1024)
    + cite("neupims.json dram_req_size: 128-bit bus, burst of 4", "high", burst_bytes=64)
    + cite(
        "NeuPIMs EstimatePIMOperationLatency: two groups of 4 banks per tFAW",
        "medium",
        "G_ACT activates one group of 4",
        banks_per_faw=8,
    )
    + cite("NeuPIMs channel_state.cc", "high", fill_columns=6)
    + cite("NeuPIMs: dual row buffers", "high", contention=0.0)
    + _COMMON
    + _timing(
        _NEUPIMS,
        "high",
        rcd=14,
        rp=14,
        ras=34,
        rtp=6,
        ccd_short=1,
        ccd_long=2,
        faw=30,
        cl=14,
        cwl=4,
        rfc=260,
        refi=3900,
        **dict(ck=1, rcd_write=14, rc=48, rtp_short=4, rrd_short=4, rrd_long=6, wr=16),
    )
    + _timing("64 B over 128 bit x 2 transfers/ns", "medium", burst=2)
    + _timing("one column per tCCD_S: " + _NEUPIMS, "low", mac_cadence=1)
    + _timing(
        "NeuPIMs configuration.cc: 32 x (tCCD_S + tCCD_L) per vector",
        "high",
        gwrite=96,
    )
    + cite(f"{_NEUPIMS}, channel_size", "high", "per channel", published__capacity_bytes=2.0**30)
    + cite("32 x 16 x 32 B per 1 ns", "low", published__internal_bandwidth=16.384e12)
    + cite("32 x 16 x 16 multiply-adds per 1 ns", "low", published__flops_per_s=16.384e12)
    + cite(
        "32 channels x 128 bit x 2 transfers/ns",
        "medium",
        "the GPU's own bandwidth is used",
        published__external_bandwidth=1.024e12,
    ),
    _make_bank_pim,
)


def _attacc(description: str, cadence: tuple[Source, ...], ratio: float) -> HardwarePreset:
    sources = (
        cite("AttAcc src/config.py num_hbm", "high", stacks=5)
        + cite("attacc_bank.yaml: 16 channels of 2", "high", pseudo_channels_per_stack=32)
        + cite("AttAcc HBM3_8Gb_2R: 2 ranks of 4 groups of 4", "high", banks=32)
        + cite("assumed as in HBM3: 16 lanes for 32 B", "medium", macs_per_unit=16)
        + cite("HBM3: 32 columns of 32 B (HBM3-PIM.cpp)", "high", row_bytes=1024)
        + cite("HBM3: 32-bit pseudo-channel, burst of 8", "high", burst_bytes=32)
        + cite("AttAcc: ACTAB has no tFAW constraint", "high", banks_per_faw=32)
        + cite("assumed equal to NeuPIMs", "low", fill_columns=6)
        + _SINGLE_ROW_BUFFER
        + _COMMON
        + _timing(
            _ATTACC,
            "high",
            rcd=14.62,
            rp=14.62,
            ras=34.62,
            rtp=6.15,
            ccd_short=1.54,
            ccd_long=3.08,
            faw=30,
            cl=14.62,
            cwl=4.62,
            rfc=350,
            refi=3900,
            **dict(ck=0.7692, rc=48.46, rtp_short=4.62, wr=16.15),
        )
        + _timing("burst of 8 at 5.2 Gb/s", "high", burst=1.54)
        + cadence
        + cite("AttAcc src/config.py", "high", "per stack", published__external_bandwidth=670.4e9)
        + cite("AttAcc BW_SCALE", "high", published__internal_over_external=ratio)
        + cite("AttAcc src/config.py", "high", "per stack", published__capacity_bytes=2.0**34)
    )
    return HardwarePreset(description, sources, _make_bank_pim)


_AIM_PIM = HardwarePreset(
    "SK hynix GDDR6-AiM: 32 channels take the place of each HBM stack",
    cite("one device of 32 channels unless the GPU has more stacks", "low", stacks=1)
    + cite("aim_simulator GDDR6_AiM_org", "high", pseudo_channels_per_stack=32, banks=16)
    + cite("aim_simulator README: 256-bit register", "high", macs_per_unit=16)
    + cite("1024 columns x 16 bit", "medium", row_bytes=2048)
    + cite("aim_simulator README: 256-bit MAC_ABK", "high", burst_bytes=32)
    + cite(
        "assumed: MAC_ABK multiplies in all banks, so all open together", "low", banks_per_faw=16
    )
    + cite("assumed equal to NeuPIMs", "low", fill_columns=6)
    + _SINGLE_ROW_BUFFER
    + _COMMON
    + _timing(
        _AIM,
        "medium",
        rcd=14.82,
        rp=14.82,
        ras=30.21,
        rtp=2.28,
        ccd_short=2.28,
        ccd_long=3.42,
        faw=15.96,
        cl=13.68,
        cwl=3.42,
        rfc=119.7,
        refi=1899.81,
        **dict(ck=0.57, rcd_mac=14.82, rcd_write=9.12, rc=45.03, rrd_short=3.99),
    )
    + _timing("32 B over 16 bit x 16 Gb/s", "medium", burst=1)
    + _timing("one column at 1 GHz", "medium", mac_cadence=1)
    + cite(
        "512 GFLOP/s a channel: 1 TFLOP/s per two-channel chip, x 32",
        "medium",
        published__flops_per_s=16.384e12,
    )
    + cite(
        "16 x 32 B at 1 GHz a channel; CENT: 32 devices of 32 channels = 512 TB/s, x 32",
        "medium",
        published__internal_bandwidth=16.384e12,
    )
    + cite(
        "16 bit x 16 Gb/s a channel, x 32",
        "medium",
        "the GPU's own bandwidth is used",
        published__external_bandwidth=1.024e12,
    ),
    _make_bank_pim,
)

_B200_EXTERNAL = cite(f"{_DUPLEX}, B200", "high", external_bandwidth=8e12)

PIMS: dict[str, HardwarePreset] = {
    "hbm-pim": _HBM_PIM,
    "hbm3-6400-pim": _HBM3_6400_PIM,
    "samsung-hbm2-pim": _SAMSUNG_PIM,
    "neupims": _NEUPIMS_PIM,
    "attacc": _attacc(
        "AttAcc HBM3 bank PIM: two ranks in parallel, no power limit",
        _timing(f"tCCD_L: {_ATTACC}", "high", mac_cadence=3.08),
        16,
    ),
    "attacc-power-limited": _attacc(
        "AttAcc HBM3 bank PIM under its power limit",
        _timing(f"tCCD_AB: {_ATTACC}", "high", mac_cadence=4.62),
        9,
    ),
    "duplex-bank-pim": HardwarePreset(
        "Bank PIM as the Duplex simulator has it: 16x external bandwidth, 1 FLOP/B",
        _B200_EXTERNAL
        + cite(f"{_DUPLEX} pim_x", "high", internal_over_external=16)
        + cite(f"{_DUPLEX} pim_op_b", "high", flop_per_byte=1)
        + cite("8 TB/s x 16 x 1", "high", "on a B200", published__flops_per_s=128e12)
        + _SINGLE_ROW_BUFFER
        + _COMMON,
        _make_rate_pim,
    ),
    "duplex-logic-pim": HardwarePreset(
        "Duplex Logic-PIM on the logic die: 4x external bandwidth, 8 FLOP/B",
        _B200_EXTERNAL
        + cite(f"{_DUPLEX} logic_x", "high", internal_over_external=4)
        + cite(f"{_DUPLEX} logic_op_b", "high", flop_per_byte=8)
        + cite("8 TB/s x 4 x 8", "high", "on a B200", published__flops_per_s=256e12)
        + cite(
            "Duplex paper, from reading notes: bundles of 8 banks",
            "medium",
            "not an input",
            published__banks_read_in_parallel=8,
        )
        + cite(
            "Duplex paper, from a reading note",
            "medium",
            "not an input",
            published__logic_die_area_overhead=0.1471,
        )
        + cite(
            "assumed: GPU and logic die read different bundles of banks at a time",
            "low",
            contention=0.0,
        )
        + _COMMON,
        _make_rate_pim,
    ),
    "gddr6-aim": _AIM_PIM,
}
