// SPDX-License-Identifier: AGPL-3.0-or-later
/** `pepsi send`: hands a message from standard input to our own SMTP server. */
import * as Console from "effect/Console"
import * as Effect from "effect/Effect"
import * as Argument from "effect/cli/Argument"
import * as Command from "effect/cli/Command"
import * as Flag from "effect/cli/Flag"
import * as Main from "../../layers/Main.ts"
import * as Header from "../mail/Header.ts"
import { Transport } from "../services/Transport.ts"
import { configFile, configuration } from "./options.ts"
import { printable } from "./terminal.ts"

/** As large as the server could take at most. */
const maxBytes = 512 * 1024 * 1024

const readStdin = Effect.promise(async () => {
  const chunks: Array<Buffer> = []
  let bytes = 0
  for await (const chunk of process.stdin) {
    chunks.push(chunk)
    bytes += chunk.length
    if (bytes > maxBytes) break
  }
  return Buffer.concat(chunks)
})

export const send = Command.make(
  "send",
  {
    config: configFile,
    from: Flag.String("from").pipe(
      Flag.withDescription("Envelope sender; an empty one is the null sender"),
      Flag.withDefault("sender@example.org")
    ),
    to: Argument.String("recipient").pipe(
      Argument.withDescription("Envelope recipient, as dave@pepsi.test"),
      Argument.variadic({ min: 1 })
    )
  },
  Effect.fn(function* ({ config: file, from, to }) {
    const config = yield* configuration(file)
    const octets = complete(yield* readStdin, from, to, new Date())
    const handed = yield* Effect.provide(
      Effect.flatMap(Transport, (transport) =>
        transport.submit({ sender: from, recipients: to, octets })
      ),
      Main.transport(config)
    )
    for (const { recipient, reply } of handed.refused)
      yield* Console.error(`${recipient}: ${printable(reply)}`)
    yield* Console.log(printable(handed.reply))
  })
).pipe(Command.withDescription("Read a message from standard input and hand it to the SMTP server"))

/** A text without a header gets one, so that the simplest input is a mail. Pure. */
export const complete = (
  octets: Buffer,
  from: string,
  to: ReadonlyArray<string>,
  now: Date
): Buffer => {
  const text = octets.toString("latin1").replace(/\r?\n/g, "\r\n")
  const { headerEnd } = Header.split(Buffer.from(text, "latin1"))
  if (headerEnd > 0) return octets
  const header = [
    `From: ${from === "" ? "MAILER-DAEMON" : from}`,
    `To: ${to.join(", ")}`,
    `Date: ${now.toUTCString().replace("GMT", "+0000")}`,
    "Subject: a message from pepsi send",
    ""
  ].join("\r\n")
  return Buffer.concat([Buffer.from(`${header}\r\n`, "utf8"), Buffer.from(text, "latin1")])
}
