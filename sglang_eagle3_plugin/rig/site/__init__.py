"""What the rig's launcher puts on ``PYTHONPATH``, and nothing else does. Inert unless ``EAGLE3_RIG=1`` is set as well."""
