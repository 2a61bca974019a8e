"""From spectra to mel power by this project's CPU kernel: each filter sums the few frequencies it has, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from clap_ds.native.library import kernel, takes


def supports(spectrum: Tensor) -> bool:
    """Whether `native_mel_power` takes such a spectrum: complex64 on the CPU, no gradient wanted."""
    wants_gradient = spectrum.requires_grad and torch.is_grad_enabled()
    return spectrum.dtype == torch.complex64 and not wants_gradient and takes(spectrum)


def native_mel_power(spectrum_BTK: Tensor, filters_FK: Tensor) -> Tensor:
    """Squared magnitudes times the filters.

    Args:
        spectrum_BTK: (batch, frames, frequencies) complex64.
        filters_FK: (mel bins, frequencies) fp32.

    Returns:
        (batch, frames, mel bins) fp32.
    """
    spectrum_BTK = spectrum_BTK.contiguous()
    B, T, K = spectrum_BTK.shape
    assert filters_FK.shape[1] == K
    assert filters_FK.dtype == torch.float32
    used = (filters_FK != 0).int()
    first, end = used.argmax(dim=1).int(), (K - used.flip(1).argmax(dim=1)).int()
    mel_BTF = filters_FK.new_empty(B, T, len(filters_FK))
    kernel("clap_mel_power")(spectrum_BTK, filters_FK.contiguous(), first, end, mel_BTF, B * T, K, len(filters_FK))
    return mel_BTF
