"""A rented machine as ssh sees it: the link, its folder, its jobs, what is copied there and back."""
