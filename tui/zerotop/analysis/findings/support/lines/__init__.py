"""The line of the job's own code that a finding names, from sampled stacks, and advice about the calls in it."""
