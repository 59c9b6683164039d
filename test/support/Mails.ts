// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Messages for tests: from one text to header and body, and signed by a key of the test's own.
 * Touches nothing.
 */
import { createPublicKey, generateKeyPairSync } from "node:crypto"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as TestClock from "effect/testing/TestClock"
import { dkimSign } from "mailauth/lib/dkim/sign.js"
import { sealMessage } from "mailauth/lib/arc/index.js"
import * as Header from "../../src/mail/Header.ts"

export interface Message {
  readonly header: Header.Header
  readonly body: Uint8Array
}

/** Octets as Latin-1; line ends become CRLF where the text has none. */
export const octets = (text: string): Buffer =>
  Buffer.from(text.includes("\r\n") ? text : text.replace(/\n/g, "\r\n"), "latin1")

/** A message as admission divides it. */
export const message = (text: string | Buffer): Message => {
  const whole = typeof text === "string" ? octets(text) : text
  const { bodyStart, headerEnd } = Header.split(whole)
  return { header: Header.parse(whole.subarray(0, headerEnd)), body: whole.subarray(bodyStart) }
}

/** A message in one piece again. */
export const whole = ({ body, header }: Message): Buffer =>
  Buffer.concat([header.raw, Buffer.from("\r\n"), body])

const { privateKey } = generateKeyPairSync("rsa", { modulusLength: 1024 })
const pem = privateKey.export({ type: "pkcs8", format: "pem" }).toString()

/** The record of the key that `sign` and `seal` use. */
export const keyRecord = `v=DKIM1; k=rsa; p=${createPublicKey(privateKey)
  .export({ type: "spki", format: "der" })
  .toString("base64")}`

export interface Signing {
  readonly domain: string
  readonly selector?: string
  readonly maxBodyLength?: number
}

/** The message with a DKIM signature on top. */
export const sign = async (
  text: string | Buffer,
  { domain, maxBodyLength, selector = "s" }: Signing
): Promise<Buffer> => {
  const input = typeof text === "string" ? octets(text) : text
  const key = { signingDomain: domain, selector, privateKey: pem }
  const { signatures } = await dkimSign(input, {
    ...key,
    canonicalization: "relaxed/relaxed",
    signatureData: [{ ...key, ...(maxBodyLength === undefined ? {} : { maxBodyLength }) }]
  })
  return Buffer.concat([Buffer.from(signatures), input])
}

/** The message with a first ARC set on top, as another host would add it. */
export const seal = async (text: string | Buffer, domain: string): Promise<Buffer> => {
  const input = typeof text === "string" ? octets(text) : text
  const fields = await sealMessage(input, {
    signingDomain: domain,
    selector: "s",
    privateKey: pem,
    cv: "none",
    authResults: `${domain}; spf=none; dkim=none`
  } as Parameters<typeof sealMessage>[1])
  return Buffer.concat([fields, input])
}

/** Lets time pass, second by second, until an effect that also waits for real work is done. */
export const elapse = <A, E, R>(
  effect: Effect.Effect<A, E, R>
): Effect.Effect<readonly [A, number], E, R> =>
  Effect.gen(function* () {
    const fiber = yield* Effect.forkChild(effect)
    let seconds = 0
    while (fiber.pollUnsafe() === undefined) {
      // Real work (streams, promises) takes its turns of the event loop before time goes on.
      for (let turn = 0; turn < 50 && fiber.pollUnsafe() === undefined; turn++) {
        yield* Effect.promise(() => new Promise((resolve) => setImmediate(resolve)))
      }
      if (fiber.pollUnsafe() !== undefined) break
      yield* TestClock.adjust("1 second")
      seconds++
    }
    return [yield* Fiber.join(fiber), seconds] as const
  })
