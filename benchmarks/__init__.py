"""Speed and memory of the three implementations and their peers, measured together and compared by ratio.

`python -m benchmarks` writes one JSON file; `python -m benchmarks plot FILE.json` draws it. The file holds:

    schema              1
    created             UTC time, ISO 8601
    machine             system, processor, cores, memory_bytes, python, load_average at the [start, end]
    parameters          everything that was asked for (plan.Plan), and the config of the model
    reference           the subject that ratios and answers are relative to: "torch"
    subjects            name to
        label           what the name stands for
        status          "measured", "skipped" (not installed), "different" (another function: not timed), "failed"
        reason          why it isn't "measured", or null
        versions        package or fact to text
        logits_dtype    of the array that the forward pass returns
        answers         "forward" (logits), "train" (losses of two steps), "generate" (token ids), each with
                        relative_difference = max|x - reference| / max|reference| (null: not finite, or another shape),
                        tolerance, equal
        measures        name to: unit ("s" or "bytes"), samples (one a round), calls (averaged in each sample),
                        first (the first call, compilation included), median, min, max,
                        ratio, ratio_min, ratio_max (to the reference, within a round; ratio is the median)
        derived         product_gflops (512 x 768 x 3072), forward_gflops, forward_share_of_product, tokens_per_second
    exact               what exact arithmetic costs: subject, measure, times of native (median, min, max), limit, met
    acceptance          the promise on NumPy's forward pass: dtype, ratio, limit, met (null: this run isn't its)

Measures: forward, train (one AdamW step), generate (greedy, with a cache), load (from the folder to the logits of one
token, so that lazy reading counts), product (a float32 matrix product), and the process's peak memory after importing,
loading and one forward pass, and, in a process of its own, after two training steps; mapped pages of the weights' file
count. All of it is on the CPU, with equal threads: the OpenMP, OpenBLAS and MKL variables, torch.set_num_threads, and
for JAX, which has no setting, NPROC, which its thread pool reads.
"""
