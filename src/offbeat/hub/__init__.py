"""Which model: hub names to directories, and the gate that every model directory passes. No torch."""

from offbeat.hub.gate import INDEX, SINGLE, check_model, count_elements, model_problems, read_object
from offbeat.hub.models import HubModel, find_model, hub_name, model_directory, weight_files

__all__ = [
    "INDEX",
    "SINGLE",
    "HubModel",
    "check_model",
    "count_elements",
    "find_model",
    "hub_name",
    "model_directory",
    "model_problems",
    "read_object",
    "weight_files",
]
