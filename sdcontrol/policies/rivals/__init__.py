"""What other systems do, as policies: same engine, same drafters, their decision rule.

Each file states its rule and the system that it follows. Where a system has one drafter, fixed at
start-up, the policy has a setting `drafter`; left out, it is the first drafter that a view offers.
"""
