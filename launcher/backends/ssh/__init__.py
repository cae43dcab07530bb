"""A rented machine as ssh sees it: the link, its folder, its jobs, copies there and back."""
