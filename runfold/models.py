"""runfold.models: language models to give to an Agent; each needs its extra (`runfold[openai]`)."""

from worker.models.openai import ModelFailed, OpenAIModel

__all__ = ["ModelFailed", "OpenAIModel"]
