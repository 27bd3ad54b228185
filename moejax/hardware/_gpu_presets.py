"""GPUs, with the number of their HBM stacks and their network."""

from typing import Any

from moejax.hardware._source import HardwarePreset, Source, cite
from moejax.hardware._system import GPU


_DUPLEX = "hardware_config.h of the Duplex authors' public LLMSimulator (scale-snu)"
_GENERAL = "public product description, from general knowledge"


def _make_gpu(values: dict[str, Any], host: None) -> GPU:
    del host
    fields = ("flops_per_s", "flops_per_s_8bit", "hbm_bandwidth", "hbm_bytes", "name")
    return GPU(**{field: values[field] for field in fields})


def _gpu(name: str, description: str, *rows: tuple[Source, ...]) -> HardwarePreset:
    named = cite("name", "high", name=name)
    return HardwarePreset(description, named + sum(rows, ()), _make_gpu)


GPUS: dict[str, HardwarePreset] = {
    "b200": _gpu(
        "b200",
        "NVIDIA B200 on an HGX board, 1000 W",
        cite(
            f"glennklockwood.com HGX B200 table (1000 W) and {_DUPLEX}",
            "high",
            "the GB200 variant is 2500 and 5000 TFLOP/s",
            flops_per_s=2250e12,
            flops_per_s_8bit=4500e12,
        ),
        cite(
            f"{_DUPLEX}; glennklockwood.com",
            "high",
            "shipping boards expose 7.7 to 8 TB/s",
            hbm_bandwidth=8e12,
        ),
        cite(
            "192 GB HBM3E, 8 stacks: glennklockwood.com",
            "high",
            "shipping boards expose 180 to 192 GB",
            hbm_bytes=192e9,
        ),
        cite(f"NVLink 5, 1.8 TB/s both directions: {_DUPLEX}", "high", link__bandwidth=900e9),
        cite(_DUPLEX, "medium", link__latency=0.8e-6),
        cite("eight HBM3E stacks, glennklockwood.com", "medium", stacks=8),
    ),
    "h100-sxm": _gpu(
        "h100-sxm",
        "NVIDIA H100 SXM, 80 GB",
        cite(
            f"{_DUPLEX}; fp8 from the NVIDIA H100 datasheet, halved for dense",
            "high",
            flops_per_s=989.4e12,
            flops_per_s_8bit=1978.9e12,
        ),
        cite(_DUPLEX, "high", hbm_bandwidth=3.352e12, hbm_bytes=80e9),
        cite(f"NVLink 4, 900 GB/s total: {_DUPLEX}", "high", link__bandwidth=450e9),
        cite(_DUPLEX, "medium", link__latency=0.8e-6),
        cite(_GENERAL, "medium", stacks=5),
    ),
    "h200-sxm": _gpu(
        "h200-sxm",
        "NVIDIA H200 SXM, 141 GB",
        cite(
            "itkb.uw.cz H200 vs B300 table (dense 989/1979)",
            "high",
            flops_per_s=989.4e12,
            flops_per_s_8bit=1978.9e12,
        ),
        cite("itkb.uw.cz H200 table", "high", hbm_bandwidth=4.8e12, hbm_bytes=141e9),
        cite("NVLink 4, 900 GB/s total: itkb.uw.cz", "high", link__bandwidth=450e9),
        cite(f"assumed equal to the H100 in {_DUPLEX}", "medium", link__latency=0.8e-6),
        cite(_GENERAL, "medium", stacks=6),
    ),
    "a100-80g-sxm": _gpu(
        "a100-80g-sxm",
        "NVIDIA A100 SXM, 80 GB",
        cite(f"{_DUPLEX}, A100 preset", "high", flops_per_s=312e12),
        cite("no native fp8: the 16-bit rate", "high", flops_per_s_8bit=312e12),
        cite(f"{_DUPLEX}, A100 preset", "high", hbm_bandwidth=2.039e12, hbm_bytes=80e9),
        cite(
            "NVLink 3, 600 GB/s both directions (AttAcc simulator configuration)",
            "high",
            "the Duplex preset uses 150 GB/s",
            link__bandwidth=300e9,
        ),
        cite(f"{_DUPLEX}, A100 preset", "medium", link__latency=3e-6),
        cite(_GENERAL, "medium", stacks=5),
    ),
    "mi300x": _gpu(
        "mi300x",
        "AMD MI300X, 192 GB",
        cite(
            "AMD data-sheet figures from general knowledge; jaredwatkins.com gives 1.3 and 2.6",
            "medium",
            flops_per_s=1307.4e12,
            flops_per_s_8bit=2614.9e12,
        ),
        cite("gpu.blog and jaredwatkins.com MI300X pages", "high", hbm_bandwidth=5.3e12),
        cite("gpu.blog MI300X page", "high", hbm_bytes=192e9),
        cite(
            "seven xGMI links, 896 GB/s both directions: gpu.blog, emergentmind",
            "high",
            "full mesh: a single pair of GPUs gets 64 GB/s per direction",
            link__bandwidth=448e9,
        ),
        cite("assumed equal to NVLink; not found", "low", link__latency=0.8e-6),
        cite(_GENERAL, "medium", stacks=8),
    ),
}
