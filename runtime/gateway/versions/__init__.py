"""The versions of the policy: published, served, called back."""
