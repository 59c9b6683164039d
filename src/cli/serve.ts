// SPDX-License-Identifier: AGPL-3.0-or-later
/** `pepsi serve`: the daemon, until a signal ends it. */
import * as Console from "effect/Console"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Command from "effect/cli/Command"
import * as Main from "../../layers/Main.ts"
import type { Configuration } from "../services/Configuration.ts"
import { boundShutdown } from "./exit.ts"
import { configFile, configuration, version } from "./options.ts"

/** Longer than sessions, workers and the database may take together. */
const shutdownSeconds = 60

export const serve = Command.make(
  "serve",
  { config: configFile },
  Effect.fn(function* ({ config: file }) {
    const config = yield* configuration(file)
    boundShutdown(shutdownSeconds)
    const command = [process.execPath, "--enable-source-maps", process.argv[1] ?? ""] as const
    const announce = Effect.flatMap(Main.running, (running) =>
      Effect.forEach(greeting(config, running, file), (line) => Console.log(line), {
        discard: true
      })
    )
    return yield* Layer.effectDiscard(announce).pipe(
      Layer.provide(Main.daemon({ config, command })),
      Layer.launch,
      Effect.provide(Main.log(config))
    )
  })
).pipe(Command.withDescription("Run the mail server: SMTP, queue and delivery, with its database"))

/** What a person at a terminal wants to know; the log tells the rest. Pure but for our pid. */
const greeting = (
  config: Configuration["Service"],
  running: Main.Running,
  file: Option.Option<string>
): ReadonlyArray<string> => {
  const { DOMAINS, HOSTNAME, STATE_DIR, USERS } = config.pepsi
  const mailboxes = config.diagnostics.filter(({ option }) => option === "MAILDIR")
  const example = `${USERS === "any" ? "dave" : (USERS[0] ?? "postmaster")}@${DOMAINS[0] ?? HOSTNAME}`
  const option = Option.isSome(file) ? ` -c ${file.value}` : ""
  return [
    `pepsi ${version} is running as process ${process.pid}; Ctrl-C stops it.`,
    "",
    ...running.listeners.map(
      ({ address, port }) => `  SMTP       ${address} port ${port}, with STARTTLS`
    ),
    `  domains    ${DOMAINS.join(" ")}`,
    `  state      ${STATE_DIR}`,
    `  database   ${running.database}`,
    ...mailboxes.map(({ value }) => `  mailboxes  ${value}/new`),
    "",
    "To try it, in another terminal:",
    "",
    `  echo 'Hello Dave' | npm run -s pepsi -- send${option} ${example}`,
    ...mailboxes.slice(0, 1).map(({ value }) => `  ls ${mailboxOf(value, example)}/new`),
    ""
  ]
}

/** The directory of MAILDIR for an address. */
const mailboxOf = (template: string, address: string): string => {
  const [mailbox = "", domain = ""] = address.split("@")
  return template.replaceAll("{mailbox}", mailbox).replaceAll("{domain}", domain)
}
