"""An engine put to the test with a model made up on the spot: does it generate, load, and serve what it loaded?"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.hf import score_sequences
from offbeat.rollout.probe import ProbeFailed, Prober
from offbeat.run.quickstart import END, VOCABULARY, tokenizer
from offbeat.weights.probe import Probe, probe_sequences


async def tried(directory: Path, start: Callable[[Path], Awaitable[Engine]]) -> str:
    """What was found, in words; raises what the engine raises, or `ProbeFailed`."""
    model = _made_up(directory)
    sequences = probe_sequences([[3, 12, 4, 13]], len(VOCABULARY), seed=0, length=16)
    engine = await start(directory)
    try:
        prober = await Prober.calibrated(engine, Probe(sequences, score_sequences(model, sequences)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        await engine.load(1, ((name, tensor.detach().clone()) for name, tensor in model.state_dict().items()))
        verdict = await prober.check(engine, Probe(sequences, score_sequences(model, sequences)))
        if not verdict.passed:
            raise ProbeFailed(f"after a load: {verdict}")
        sampling = Sampling(4, (VOCABULARY[END],))
        [answers] = await engine.generate([Request("trial", torch.tensor([3, 12, 4, 13]).numpy(), 2, sampling, 0)])
        versions = {span.version for answer in answers for span in answer.versions}
        if versions != {1}:
            raise ProbeFailed(f"after loading version 1 its tokens are labelled {sorted(versions)}")
    finally:
        await engine.close()
    return f"generates, loads, and serves what it loaded: {verdict}"


def _made_up(directory: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,  # where an engine is likeliest to go on with weights it had before
        bos_token_id=None,
        eos_token_id=VOCABULARY[END],
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model
