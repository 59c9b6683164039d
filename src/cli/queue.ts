// SPDX-License-Identifier: AGPL-3.0-or-later
/** `pepsi queue`: what waits in the queue. Reads only. */
import * as Console from "effect/Console"
import * as Data from "effect/Data"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Argument from "effect/cli/Argument"
import * as Command from "effect/cli/Command"
import * as Flag from "effect/cli/Flag"
import * as Main from "../../layers/Main.ts"
import { failedUnderHold, withoutClient } from "../pipeline/Job.ts"
import { Queue } from "../services/Queue.ts"
import type { Listed } from "../services/Queue.ts"
import { codes } from "./exit.ts"
import { configFile, configuration, json } from "./options.ts"
import { jsonLine, oneLine, printable } from "./terminal.ts"

/** Rows of one look at the table. */
const page = 500

/** No row of that token, or several. */
class NotFound extends Data.TaggedError("NotFound")<{ readonly token: string }> {
  readonly exitCode = codes.data
  override get message(): string {
    return `no message ${this.token} in the queue, or more than one that begins so`
  }
}

const list = Command.make(
  "list",
  {
    config: configFile,
    json,
    status: Flag.Literals("status", ["pending", "deferred", "parked", "held", "failed"]).pipe(
      Flag.withDescription("Only messages in this state"),
      Flag.optional
    ),
    section: Flag.String("section").pipe(
      Flag.withDescription("Only messages in this section"),
      Flag.optional
    ),
    limit: Flag.Int("limit").pipe(
      Flag.withDescription("At most so many messages"),
      Flag.withDefault(100)
    )
  },
  Effect.fn(function* ({ json: asJson, limit, section, status, ...flags }) {
    const config = yield* configuration(flags.config)
    yield* Effect.provide(
      Effect.gen(function* () {
        const queue = yield* Queue
        let after = 0
        for (let left = limit; left > 0; left -= page) {
          const rows = yield* queue.list({
            status: Option.getOrUndefined(status),
            section: Option.getOrUndefined(section),
            after,
            limit: Math.min(left, page)
          })
          for (const row of rows) yield* Console.log(asJson ? jsonLine(shown(row)) : line(row))
          if (rows.length < page) return
          after = rows[rows.length - 1]!.id
        }
      }),
      Main.database(config)
    )
  })
).pipe(Command.withDescription("List messages, the oldest first"))

const show = Command.make(
  "show",
  {
    config: configFile,
    json,
    token: Argument.String("token").pipe(
      Argument.withDescription("Queue id, or enough of its beginning")
    )
  },
  Effect.fn(function* ({ config: file, json: asJson, token }) {
    const config = yield* configuration(file)
    const found = yield* Effect.provide(
      Effect.flatMap(Queue, (queue) => queue.show(token)),
      Main.database(config)
    )
    if (Option.isNone(found)) return yield* new NotFound({ token })
    const { headers, ...row } = found.value
    const text = Buffer.from(headers).toString("utf8").replaceAll("\r\n", "\n")
    if (asJson) return yield* Console.log(jsonLine({ ...shown(row), headers: text }))
    for (const part of [...details(row), "", printable(text)]) yield* Console.log(part)
  })
).pipe(Command.withDescription("Show one message with its header"))

export const queue = Command.make("queue").pipe(
  Command.withDescription("Look into the queue"),
  Command.withSubcommands([list, show])
)

/** Who sent a message from where is no business of a list. */
const shown = ({ state, ...row }: Listed) => ({ ...row, state: withoutClient(state) })

const line = (row: Listed): string =>
  [
    row.token,
    row.section,
    row.status,
    `${row.sizeBytes}`,
    age(row.ageSeconds),
    `<${oneLine(row.sender)}>`,
    oneLine(row.recipients.slice(0, 3).join(",")) + (row.recipients.length > 3 ? ",…" : "")
  ].join(" ")

const details = (row: Listed): ReadonlyArray<string> => [
  `token       ${row.token}`,
  `section     ${row.section}`,
  `status      ${row.status}${waitsFor(row)}`,
  `age         ${age(row.ageSeconds)}`,
  `size        ${row.sizeBytes}`,
  `attempts    ${row.attempts}`,
  `crashes     ${row.crashes}`,
  `last error  ${oneLine(row.lastError ?? "none")}`,
  `sender      <${oneLine(row.sender)}>`,
  ...row.recipients.map((recipient) => `recipient   <${oneLine(recipient)}>`),
  `state       ${jsonLine(withoutClient(row.state))}`
]

const waitsFor = ({ dueInSeconds, parkedReason }: Listed): string => {
  const due = dueInSeconds === null ? "" : `, due in ${age(Math.max(0, dueInSeconds))}`
  if (parkedReason === failedUnderHold) return `${due}, failed before it was held`
  return parkedReason === null ? due : `${due}, waits for ${oneLine(parkedReason)}`
}

/** "3d4h", "5m2s". Pure. */
const age = (seconds: number): string => {
  const units = [
    ["d", 86_400],
    ["h", 3600],
    ["m", 60],
    ["s", 1]
  ] as const
  const whole = Math.floor(seconds)
  const first = units.findIndex(([, size]) => whole >= size)
  if (first === -1) return "0s"
  return units
    .slice(first, first + 2)
    .map(([unit, size], i) => [
      i === 0 ? Math.floor(whole / size) : Math.floor((whole % units[first]![1]) / size),
      unit
    ])
    .filter(([n], i) => i === 0 || n !== 0)
    .map(([n, unit]) => `${n}${unit}`)
    .join("")
}
