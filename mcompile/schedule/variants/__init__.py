"""Other dags for the same task: another algorithm with the same inputs and outputs."""

from mcompile.schedule.variants.registry import make_variant, variant_names

__all__ = ["make_variant", "variant_names"]
