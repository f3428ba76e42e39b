"""Traffic against a server that speaks OpenAI's API, measured by clients in processes of their own:
`photon-ext bench`.
"""
