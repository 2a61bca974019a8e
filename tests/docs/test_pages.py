"""Pages that list what the code has: commands, presets and packaged configurations."""

import re

import pytest

from clap_ds.cli import GROUPS
from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import TextLengths, forward_flops
from clap_ds.presets import CONFIGURATIONS, PRESETS
from tests.processes import ROOT


def read_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of a page's tables by the name in their first column."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = [re.split(r" *\| *", row)[1:-1] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    return {name.strip("`"): cells for name, *cells in rows}


def test_commands_page_has_each_command_with_its_purpose():
    rows = read_rows("cli.md")
    for commands in GROUPS.values():
        for name, (_, purpose) in commands.items():
            assert rows[f"clap-ds {name}"][0].partition(":")[0] == purpose.partition(":")[0]


def test_presets_page_has_each_name_with_its_description():
    rows = read_rows("presets.md")
    for name, description in {**PRESETS, **CONFIGURATIONS}.items():
        assert rows[name][0] == description


@pytest.mark.parametrize("name", PRESETS)
def test_presets_page_states_sizes_and_gflops(name):
    preset = load_preset(name)
    tokens = TextLengths.fixed(min(77, preset.text.max_tokens))
    _, sizes, joint_dim, _, gflops = read_rows("presets.md")[name]
    channels = f"{preset.audio.embed_dim}; {', '.join(map(str, preset.audio.depths))}"
    assert (sizes, joint_dim) == (channels, f"{preset.joint_dim:,}")
    assert gflops == f"{forward_flops(preset, tokens, 'model') / 1e9:.2f}"
