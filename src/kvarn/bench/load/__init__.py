"""Load for any server that speaks OpenAI's protocol, ours or another's: what is asked, what comes back, the sums."""
