"""Why a job or rank failed: exits, kernel kills, and the out-of-memory post-mortem. Drawn in ``ui.base.post_mortem``."""
