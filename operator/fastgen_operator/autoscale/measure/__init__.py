"""Derive token rates, demand and capacity from scraped samples. Pure."""
