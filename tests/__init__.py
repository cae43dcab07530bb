"""The tests: `unit` and `e2e` run in the launcher's environment, `runtime` in the runtime's own."""
