"""runfold.testing: what tests of agents need: a model that plays a script and counts."""

from worker.models.scripted import ScriptedModel, call, say

__all__ = ["ScriptedModel", "call", "say"]
