"""Baseline and EAGLE-3 side by side: the same prompts through both, what each costs, what pays, and why."""
