"""From spectra to mel power by this project's CPU kernel: each filter sums the few frequencies it has, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from clap_ds.native.library import kernel


def native_mel_power(spectrum_BTK: Tensor, filters_FK: Tensor) -> Tensor:
    """Squared magnitudes times the filters, without gradients.

    Args:
        spectrum_BTK: (batch, frames, frequencies) complex64 on the CPU.
        filters_FK: (mel bins, frequencies) fp32.

    Returns:
        (batch, frames, mel bins) fp32.
    """
    spectrum_BTK, filters_FK = spectrum_BTK.contiguous(), filters_FK.contiguous()
    B, T, K = spectrum_BTK.shape
    assert spectrum_BTK.dtype == torch.complex64
    assert spectrum_BTK.is_cpu
    assert filters_FK.shape[1] == K
    assert filters_FK.dtype == torch.float32
    used = (filters_FK != 0).int()
    first, end = used.argmax(dim=1).int(), (K - used.flip(1).argmax(dim=1)).int()
    mel_BTF = filters_FK.new_empty(B, T, len(filters_FK))
    kernel("clap_mel_power")(spectrum_BTK, filters_FK, first, end, mel_BTF, B * T, K, len(filters_FK))
    return mel_BTF
