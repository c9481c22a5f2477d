"""Train a tiny model off-policy and plot its curve: one to three minutes on two CPU cores, no data, account or GPU."""

import offbeat

run = offbeat.train(
    {"steps": 100, "prompts_per_step": 64, "group_size": 8, "sampling": {"max_tokens": 4}},
    model={"path": offbeat.tiny_model("runs/tiny-model"), "compute": "float32", "serve": "float32"},
    engine={"kind": "hf"},
    task={"name": "arithmetic", "options": {"digits": 1}},
    sync={"every": 10},  # the answers it learns from are up to 9 steps old
    optimizer={"learning_rate": 4e-4},
    out="runs/first",
)
print(run.metrics()[["reward_mean", "lag", "drift_tv_token"]].tail())
run.plot("reward_mean", to="curve.svg")
