"""The memory that a configuration should need: published formulas, and DeepSpeed's own estimates."""
