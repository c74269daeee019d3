"""The memory that a setting should need: published formulas, and DeepSpeed's own estimates."""
