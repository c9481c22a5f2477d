"""Train a tiny model on rewards and data of your own: one to three minutes on two CPU cores, no account or GPU."""

import offbeat


def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
model = offbeat.tiny_model("tiny-model")
# Weights are published every 5 steps, so the answers it learns from are up to 4 steps behind.
run = offbeat.train(model, correct, rows, steps=100, sync={"every": 5}, max_tokens=4, learning_rate=4e-4, out="sums")
print(run.metrics[["reward_mean", "lag", "drift_tv_token"]].tail())
run.plot(to="curve.svg")
