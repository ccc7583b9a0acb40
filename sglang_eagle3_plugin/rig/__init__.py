"""Real SGLang without a GPU: environments, tiny models, replacements for absent kernels."""
