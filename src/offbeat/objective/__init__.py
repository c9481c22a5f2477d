"""The mathematics of off-policy group-relative RL, as pure functions of tensors. Usable alone, in any training loop.

An objective is a value (`spec.Objective`), the published ones are in `presets.PRESETS`, and two functions apply it:

    credit.assign_credit   rewards of whole groups  ->  advantages and weights, once per batch
    losses.policy_loss     log-probs of any rows    ->  a loss that adds up over micro-batches and ranks

gates.py      gates over the whole batch, which `policy_loss` takes as an argument
logprobs.py   log-probs and entropies from hidden states, without full logits
bound.py      drift from the data, and the improvement that the data still guarantees

`spec` and `presets` import no torch, so that a configuration is checked in milliseconds.
Shapes: B prompts, G completions each, N completions of a batch in any order, T tokens, H hidden, V vocabulary.
"""
