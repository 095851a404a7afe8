"""`pipeline("text-generation")` with the arguments and records of transformers."""

from .text_generation import TextGenerationPipeline, pipeline

__all__ = ["TextGenerationPipeline", "pipeline"]
