"""What is known about this machine without torch."""

from pathlib import Path

import pytest

from offbeat.placement import hardware


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("model name : A\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("Features : fp asimd bf16\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("no such line\n", True),
    ],
)
def test_whether_bfloat16_is_emulated_is_read_from_the_processor(
    text: str, answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    assert hardware.multiplies_bfloat16(), "without the file nobody is advised"
    (tmp_path / "cpuinfo").write_text(text)
    assert hardware.multiplies_bfloat16() is answer
