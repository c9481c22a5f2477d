"""How a version reaches vLLM's workers: through memory that they map, and one layerwise reload inside each.

The engine writes the weights once, before it pauses anything, into a nameless file of memory (memfd). Its workers map
the same pages, so nothing is sent and nothing pickled; when the last process lets go, the memory is gone, crash or not.
"""

import json
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from offbeat.rollout.engine import Weights

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

HEAD: Final = "lm_head.weight"
_ALIGNMENT: Final = 64
GRACE: Final = 15.0
"""Seconds for an engine core to end by itself before it is killed."""


class SharedWeights:
    """Tensors in memory that other processes of this machine and user can map.

    >>> with SharedWeights() as shared:
    ...     shared.write([("a", torch.arange(3)), ("b", torch.ones(2, 2, dtype=torch.bfloat16))])
    ...     {name: tuple(tensor.shape) for name, tensor in read(shared.path, shared.table)}
    {'a': (3,), 'b': (2, 2)}
    """

    def __init__(self) -> None:
        self._file = open(os.memfd_create("offbeat-weights", os.MFD_CLOEXEC), "wb")  # noqa: SIM115 - closed on exit
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._places: list[tuple[str, str, list[int], int]] = []

    def __enter__(self) -> "SharedWeights":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def table(self) -> str:
        """What lies where, as JSON: name, dtype, shape, offset."""
        return json.dumps(self._places)

    def write(self, weights: Weights) -> None:
        """One tensor after another, so that a generator never has to hold them all."""
        for name, tensor in weights:
            host = tensor.detach().to("cpu").contiguous()
            place = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
            self._file.seek(place)
            self._file.write(host.view(-1).view(torch.uint8).numpy().data)
            self._places.append((name, str(host.dtype).removeprefix("torch."), list(host.shape), place))
        self._file.flush()


def read(path: str, table: str) -> Iterator[tuple[str, Tensor]]:
    """What `SharedWeights.write` wrote, as views of the mapped memory."""
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable views, as torch wants, of private pages
    for name, dtype, shape, place in json.loads(table):
        kind = getattr(torch, dtype)
        count = int(np.prod(shape, dtype=np.int64))
        yield name, torch.frombuffer(pages, dtype=kind, count=count, offset=place).view(shape)


class WorkerPart:
    """Mixed into vLLM's worker class: what the engine calls by name inside every worker process."""

    model_runner: "GPUModelRunner"

    def offbeat_live_with(self, pid: int) -> None:
        """End the engine core, and with it this worker, when process `pid` ends: killed, it could not do so itself."""
        owner, core = os.pidfd_open(pid), os.getppid()

        def follow() -> None:
            select.select([owner], [], [])
            for last_word in (signal.SIGTERM, signal.SIGKILL):
                if os.getppid() == core:
                    os.kill(core, last_word)
                time.sleep(GRACE)

        threading.Thread(target=follow, name="offbeat-live-with", daemon=True).start()

    def offbeat_receive(self, path: str, table: str) -> None:
        """Replace all weights.

        On CPU linear layers are prepacked and their plain weights gone, so loading into the live model cannot work: a
        layerwise reload takes each layer back to its loadable form, fills it and packs it again. On GPU the same recipe
        runs, from host memory (not run by us); vLLM's `nccl` transfer engines would plug in here instead, as
        `start_weight_update`, `update_weights`, `finish_weight_update` of the worker around their own receive.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, config = self.model_runner.get_model(), self.model_runner.vllm_config
        with set_current_vllm_config(config), torch.device(self.model_runner.device):
            initialize_layerwise_reload(model)
            model.load_weights(read(path, table))
            finalize_layerwise_reload(model, config.model_config)
            self.offbeat_repair_heads(model)

    def offbeat_repair_heads(self, model: torch.nn.Module) -> None:
        """Pack output heads again.

        A tied head owns no weights, so the reload passes it by, and on CPU its packed copy would silently go on serving
        the version before.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def saved_shapes(model_dir: Path) -> dict[str, list[int]]:
    """Names and shapes in a model directory's safetensors files: what every version has to bring."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    if not shapes:
        raise FileNotFoundError(f"{model_dir} has no *.safetensors file: save the model with save_pretrained")
    return shapes


def fitting(weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, list[int]], *, tied: bool) -> Weights:
    """The weights, refused where they are not exactly what the model needs; a tied head is left out.

    vLLM itself would keep what a version does not bring, and serve a mixture.

    >>> dict(fitting([("a", torch.zeros(2)), ("lm_head.weight", torch.zeros(2))], {"a": [2]}, tied=True)).keys()
    dict_keys(['a'])
    """
    needed = {name for name in shapes if not (tied and name == HEAD)}
    for name, tensor in weights:
        if tied and name == HEAD:
            continue
        if name not in shapes:
            raise ValueError(f"the model has no weights called {name}")
        if list(tensor.shape) != list(shapes[name]):
            raise ValueError(f"{name} is {list(shapes[name])} and was given as {list(tensor.shape)}")
        needed.discard(name)
        yield name, tensor
    if needed:
        raise ValueError(f"weights are missing: {', '.join(sorted(needed)[:3])}")
