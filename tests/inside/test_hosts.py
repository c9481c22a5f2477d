"""The real TRL, verl and Trinity-RFT train with our presets, and have the hooks that we use, each by its name."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TRL_HOOKS = {
    "_generate": ["prompts"],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_generate_and_score_completions": ["inputs"],
    "_compute_loss": ["model", "inputs"],
    "_save_checkpoint": ["model", "trial"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
}
TRL_NAMES = (
    "_last_loaded_step", "sync_weights", "sampling_per_token_logps", "old_per_token_logps", "importance_sampling_ratio",
    "current_gradient_accumulation_steps", "reward_weights", "eos_token_ids", "vllm_enable_sleep_mode",
)  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("host", ["trl", "verl", "trinity", "trip"])
def test_presets_inside_the_real_host(host: str) -> None:
    # A process of its own, because hosts warn at import and warnings are errors here.
    command = [sys.executable, "-W", "ignore", "-m", f"lab.parity.inside_{host}", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("inside.") >= 5, done.stdout  # one that misses its goal makes the command fail


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("hook", TRL_HOOKS)
def test_trl_has_the_method(hook: str) -> None:
    from trl import GRPOTrainer

    assert list(inspect.signature(getattr(GRPOTrainer, hook)).parameters)[1:] == TRL_HOOKS[hook]


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TRL_NAMES)
def test_trl_uses_the_name(name: str) -> None:
    from trl.trainer import grpo_trainer

    assert name in inspect.getsource(grpo_trainer)


@pytest.mark.engine
def test_trl_refuses_settings_with_the_line_to_write() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.inside.refused_by_trl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("12 refused")


PLUGIN = "import verl.utils.config, verl.trainer.ppo.rollout_corr_helper as r, verl.trainer.ppo.core_algos as c"
VERL_HOOKS = {
    "plugins": "import verl, inspect; assert 'verl.plugins' in inspect.getsource(verl)",
    "registries": f"{PLUGIN}; assert 'offbeat/grpo' in c.POLICY_LOSS_REGISTRY and c.ADV_ESTIMATOR_REGISTRY",
    "checks": f"{PLUGIN}; assert 'offbeat' in verl.utils.config.validate_config.__module__",
    "bypass": f"{PLUGIN}; assert 'offbeat' in r.apply_bypass_mode.__module__",
}
TRINITY_HOOKS = {
    "loss": "from trinity.algorithm import POLICY_LOSS_FN as r; r.get('offbeat.inside.trinity.PresetLoss')()",
    "keys": "from offbeat.inside.trinity import PresetLoss as p; assert 'rollout_log_probs' in p().select_keys",
    "advantage": "from trinity.algorithm import ADVANTAGE_FN as r; r.get('offbeat.inside.trinity.PresetAdvantage')()",
    "operator": "from offbeat.inside.trinity import KeepLog; assert hasattr(KeepLog, 'set_auxiliary_model')",
    # Read and not imported: it needs an engine's packages.
    "version": "from pathlib import Path; import trinity; root = Path(trinity.__file__).parent; "
    "assert 'info[\"model_version\"]' in (root / 'explorer' / 'workflow_runner.py').read_text()",
}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("host", "hook"), [*(("verl", one) for one in VERL_HOOKS), *(("trinity", one) for one in TRINITY_HOOKS)]
)
def test_a_host_has_the_hook(host: str, hook: str) -> None:
    from lab.parity import hosts

    code = {"verl": VERL_HOOKS, "trinity": TRINITY_HOOKS}[host][hook]
    done = subprocess.run([sys.executable, "-c", code], env=hosts.environment(host), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
