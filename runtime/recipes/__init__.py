"""torchtune recipes, each runnable by itself with `tune run`."""
