"""What made steps slower: the part of the iteration that changed, and what changed with it. Contains no detector."""
