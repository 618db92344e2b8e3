"""The peak FLOP/s of devices in dense matrix products, by which MFU divides."""

from __future__ import annotations

import torch

from megatron_sp.config.schema import Run

#: Part of a device's name -> TFLOP/s in bf16 and fp16 with fp32 accumulation, without sparsity. The first entry whose
#: text is in the device's name is used. Source: the manufacturers' data sheets.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0), ("B200", 2250.0), ("GH200", 989.4), ("H200", 989.4), ("H100 PCIe", 756.0), ("H100 NVL", 835.0),
    ("H100", 989.4), ("H800", 989.4), ("A100", 312.0), ("A800", 312.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
    ("A10G", 70.0), ("A10", 125.0), ("V100", 125.0), ("MI325X", 1307.4), ("MI300X", 1307.4), ("MI250X", 383.0))


def peak_tflops(run: Run, device: torch.device) -> float:
    """Return the peak TFLOP/s of one device in the run's compute type; 0.0 when unknown (fp32, CPUs, other devices)."""
    if run.logging.device_peak_tflops:
        return run.logging.device_peak_tflops
    if device.type != "cuda" or run.precision.dtype == "float32":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS if part in name), 0.0)
