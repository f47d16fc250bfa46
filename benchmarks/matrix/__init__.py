"""How the frameworks' own arithmetic drifts from version to version, and whether exact arithmetic stays where it is.

`nox -s matrix` makes an environment for each version, runs `python -m benchmarks.matrix.measure` in it, and merges what
they print with `python -m benchmarks.matrix.merge`, which draws the chart too. The merged file holds:

    schema          1
    environments    name, such as "torch-2.13.0", to
        framework   the one whose version this is
        version     of it
        status      "measured", "failed" (no environment, or it ran into an error) or "not run" (it was not asked for)
        reason      why it isn't "measured", or null
        versions    package to version, and Python's
        machine     architecture, processor, instructions (the widest set of vector instructions that NumPy found)
        models      name to
            float32, bfloat16   logits_max, logits_rms, loss, gradients: errors of native arithmetic; logits_sha256
            fingerprint         of the exact logits
        odd         its models whose fingerprint isn't that of most environments
    fingerprints    model to the fingerprint of most environments

Errors are against NumPy in float64 on the same float32 weights. logits_max and logits_rms, the largest and the root
mean square, are relative to the largest logit; loss is relative to the loss; gradients is the largest over all
parameters, relative to the largest gradient of the same layer. bfloat16 includes the rounding of the weights; NumPy has
none.
"""
