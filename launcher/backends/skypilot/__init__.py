"""A rented machine as SkyPilot sees it: prices, the launch, the end and its proof, in processes of their
own."""
