"""Random prompts for compress, as `kvedge methods --check` uses them."""

from pykvedge.lab.checks.prompts import LAYOUTS, Prompt, image_mask, profiles_of, projection_of, prompt

__all__ = ["LAYOUTS", "Prompt", "image_mask", "profiles_of", "projection_of", "prompt"]
