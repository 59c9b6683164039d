// SPDX-License-Identifier: AGPL-3.0-or-later
/** `pepsi bench`: measurements, each with what limited it. */
import * as Console from "effect/Console"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Command from "effect/cli/Command"
import * as Flag from "effect/cli/Flag"
import * as fs from "node:fs"
import * as Latency from "../../bench/latency.ts"
import * as Support from "../../bench/support.ts"

const jsonFile = Flag.String("json").pipe(
  Flag.withMetavar("FILE"),
  Flag.withDescription("Also write the figures to this file"),
  Flag.optional
)

const latency = Command.make(
  "latency",
  {
    count: Flag.Int("count").pipe(
      Flag.withDescription("Single mails of 1 KiB"),
      Flag.withDefault(50)
    ),
    burst: Flag.Int("burst").pipe(
      Flag.withDescription("Mails of 2 KiB sent at once afterwards"),
      Flag.withDefault(0)
    ),
    connections: Flag.Int("connections").pipe(
      Flag.withDescription("Of the burst"),
      Flag.withDefault(64)
    ),
    json: jsonFile
  },
  Effect.fn(function* ({ json, ...settings }) {
    const result = yield* Latency.latency(settings, (text) => Console.error(`... ${text}`))
    const columns = ["min", "median", "mean", "p95", "max"]
    const cell = (value: string | number | undefined) =>
      typeof value === "number" ? value.toFixed(2) : (value ?? "")
    yield* Console.log(
      Support.table(
        ["milliseconds", ...columns],
        result.rows.map((row) => [
          String(row["what"]),
          ...columns.map((column) => cell(row[column]))
        ])
      )
    )
    yield* Console.log("")
    yield* Console.log(
      Support.table(
        ["figure", "value"],
        Object.entries(result.figures).map(([name, value]) => [name, value.toFixed(3)])
      )
    )
    if (Option.isSome(json)) {
      const file = json.value
      yield* Effect.try({
        try: () => fs.writeFileSync(file, Support.document(result)),
        catch: (cause) => new Support.BenchError({ what: `cannot write ${file}`, cause })
      })
    }
  })
).pipe(
  Command.withDescription("From connect to the 250 and to the file, on an idle daemon of its own")
)

export const bench = Command.make("bench").pipe(
  Command.withDescription("Measure this program on this machine"),
  Command.withSubcommands([latency])
)
