"""The data contract, written once for every stage: plan -> units -> receipt per unit -> manifest.

    <output>/.tokenmill/<stage>/plan.json            what will be made, from what; its hash is the plan id
    <output>/.tokenmill/<stage>/receipts/<unit>.json one per finished unit
    <output>/.tokenmill/<stage>/failures/<unit>.json why a unit failed last; removed by its receipt
    <output>/.tokenmill/<stage>/attempts/<unit>~<attempt>/  what an attempt is writing; gone when it commits
    <output>/.tokenmill/<stage>/runs/<run>           a Job whose workers agreed on a plan, and whether it had its turn
    <output>/.tokenmill/<stage>/manifest.json        only when every unit has its receipt

`record` holds the plan, receipt and manifest, `attempt` who is writing and whether it is alive,
`workspace` the commit protocol, `lineage` what a stage reads and where a document came from,
`planning` the one-winner agreement on a plan, `runs` who may replace it, `worker` the loop that runs a share of units.
"""
