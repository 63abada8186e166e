"""The processes of Omnistage: the router and the stages."""
