"""Stable Diffusion: base models, data set, recipe, loop, sampling."""
