"""The line of the job's own code that a finding names: found in sampled stacks, and what its calls are known to do."""
