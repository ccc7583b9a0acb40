"""Static checks of a deployment: one check a module, each a function (deployment) -> findings."""
