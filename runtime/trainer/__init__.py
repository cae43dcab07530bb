"""The trainer's process: the policy, the losses, one optimizer step."""
